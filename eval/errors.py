"""The one error that a user can mend: wrong options, data that does not fit, a run that may not go on."""


class EvalError(Exception):
    """A refusal that names what was given, what is supported and what to do. Commands print it and exit with 2."""
