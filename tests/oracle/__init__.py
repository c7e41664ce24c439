"""Does this checkout write the event logs that an earlier commit wrote, over the same worlds?

Simulator and multiplexer share the scheduler, so a mistake in it passes every test that compares the two.
This compares with the past: ``worlds`` makes histories as plain data, ``frozen`` runs them in the code of
the earlier commit and ``current`` in that of the checkout; ``bin/test oracle`` starts both and shows the
first difference of each world. ``current`` speaks the earlier commit's words, so what was only renamed
since makes no difference.
"""
