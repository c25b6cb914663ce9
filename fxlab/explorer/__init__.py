"""Watching a program change: record edits, step through them, judge what they did.

`fxlab.record` and `fxlab.explore` are the two calls that people come for. Nothing here imports
ipywidgets or anywidget before a widget is asked for.
"""
