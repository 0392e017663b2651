"""What works with what: every plugin of the package, run under every condition of the matrix.

``python -m tests.matrix`` writes ``docs/matrix.json``, ``tests/test_matrix.py`` runs all of it
again and compares, and the documentation shows it. No cell is written by hand.
"""
