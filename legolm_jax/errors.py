"""Errors that a user can act on."""


class InputError(ValueError):
  """Bad input: the message is one line naming what is wrong and where.

  Commands print it as `error: MESSAGE` and exit with status 1. Raise it with
  the file, row, tensor or flag concerned, what was expected and what was found.
  """
