"""How pictures of lines look that are files of their own, on light and dark pages."""

FONT = 'system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif'
# Colours that differ in lightness too, on both pages.
SERIES_STYLE = """
:root { --page: #fcfcfa; --ink: #1c1e21; --soft: #62676d; --rule: #e3e4df; }
:root { --series-0: #b7701f; --series-1: #0f766e; --series-2: #7d6ea0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181a; --ink: #e8e8e4; --soft: #9da2a7; --rule: #2d3033; }
  :root { --series-0: #e0a458; --series-1: #3fa796; --series-2: #9b8cc0; }
}
.page { fill: var(--page); }
.rule { stroke: var(--rule); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.stroke-0 { stroke: var(--series-0); } .fill-0 { fill: var(--series-0); }
.stroke-1 { stroke: var(--series-1); } .fill-1 { fill: var(--series-1); }
.stroke-2 { stroke: var(--series-2); } .fill-2 { fill: var(--series-2); }
"""
