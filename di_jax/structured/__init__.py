"""Grammar compilation and matching; the only package that will import xgrammar."""
