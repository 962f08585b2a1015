"""Commands for those who maintain Wavegraph; the library uses none of them."""
