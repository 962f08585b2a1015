"""Ways of running recorded programs, behind `base.Backend`."""
