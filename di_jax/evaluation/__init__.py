"""Evaluation: items with known answers, judges, and scores. Host code only; generation is the engine's."""
