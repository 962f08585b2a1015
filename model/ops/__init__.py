"""The operators that CORE and CODA are written in, one module per implementation."""
