"""nbgrader's settings for a course with these masters: copy this file into the course's folder."""

from fxlab.teach.for_nbgrader import generate_preprocessors

c = get_config()  # noqa: F821  (nbgrader provides it)

c.CourseDirectory.course_id = "fxlab"
# Stubs name their exercise, as `fxlab release` writes them.
c.GenerateAssignment.preprocessors = generate_preprocessors()
# A check stops an endless loop itself, after 10 seconds; a whole notebook may have several.
c.ExecutePreprocessor.timeout = 300
c.ExecutePreprocessor.interrupt_on_timeout = True
c.Execute.timeout = 300
c.Execute.interrupt_on_timeout = True
