"""The demo: the shop under stress, with everything it did counted from outside the library.

python -m example_project.demo [--without-locks] [--short]
"""
