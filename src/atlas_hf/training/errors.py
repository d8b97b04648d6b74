"""The error of a user's input, apart from errors of the program."""


class InputError(ValueError):
    """Input that cannot be used. The message names what, its value, and the remedy."""
