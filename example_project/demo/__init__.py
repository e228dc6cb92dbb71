"""The demo: the shop under stress, judged by records made outside the library.

python -m example_project.demo [--without-locks] [--short]
"""
