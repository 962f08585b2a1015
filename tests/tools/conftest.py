from tests.checkout import make_importable

make_importable()
