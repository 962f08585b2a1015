"""One engine, one step at a time: requests in, outputs out. It builds nothing and measures nothing."""
