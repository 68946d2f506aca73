"""Both derivatives of a program against finite differences, in float64."""
