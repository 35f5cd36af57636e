"""What attention does on a prompt's real queries, before any task is scored: the paper's diagnostics, and more."""
