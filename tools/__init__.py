"""Commands for those who maintain Wavegraph, run from a checkout: the package uses none of them."""
