"""The operator benchmark: one decoding call of one layer, sampled and dense, timed in the same run (Appendix E)."""
