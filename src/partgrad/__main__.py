"""`python -m partgrad audit script.py`: run a script, and check every gradient that it takes."""

from ._audit import main

if __name__ == "__main__":
    raise SystemExit(main())
