"""Further credit functions, a file for each family: published, or ours where the first line of a docstring says so.

registry.py has all by name; variants.py has advantages, losses and shapings; credit_function.py is the decorators'
machinery.
"""
