"""What people are shown at the end of a run: a page, a table, Markdown, a JSON document.

A run folder's store -> RunView -> page | markdown | document, of one run or of several.
"""
