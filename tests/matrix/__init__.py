"""The compatibility matrix: every plugin of the package under every condition.

``python -m tests.matrix`` runs all cells and writes ``docs/matrix.json``; ``tests/test_matrix.py``
runs a sample and compares.
"""
