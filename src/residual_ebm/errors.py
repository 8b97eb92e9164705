"""Errors meant to be read by a person.

A `UserError` is one line that names the field, the value it had and what to do about it. The
command line prints it and exits with code 2; no traceback, because the fault is not in the code.
"""


class UserError(Exception):
    """Something the user can mend: `field` had `value`, and `remedy` says what to do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        shown = value if isinstance(value, str) else repr(value)
        # One line, whatever the value contained: a path with a newline must not break it.
        super().__init__(" ".join(f"{field} = {shown}: {remedy}".split()))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, object, str]]:
        """It may come from another process."""
        return UserError, (self.field, self.value, self.remedy)
