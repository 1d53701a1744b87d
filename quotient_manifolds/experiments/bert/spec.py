"""What is measured on the zoo of BERTs, as a spec."""


def full_spec() -> str:
    return ""


def fast_spec() -> str:
    return ""
