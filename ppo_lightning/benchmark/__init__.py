"""Recipes by seeds: training them (``benchmark``, ``ablate``), reporting, and telling two results apart (``compare``)."""
