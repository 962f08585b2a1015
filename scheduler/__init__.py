"""What runs when: requests, tasks, frontiers, pages, policies. Imports no torch."""
