"""Train recipes by seeds (``benchmark``, ``ablate``), report on them, and compare results (``compare``)."""
