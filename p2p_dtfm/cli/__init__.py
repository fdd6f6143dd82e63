"""The commands; all but the daemon itself are thin clients."""


def main() -> None:
    raise SystemExit("not yet")
