"""The exercises of the course, one file each; `fxlab.teach.exercise` finds them by name."""
