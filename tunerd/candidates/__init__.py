"""Task -> Candidates: the sources of candidates, one file or folder each."""
