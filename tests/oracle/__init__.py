"""Does this checkout write the event logs that an earlier commit wrote, over the same worlds?

Simulator and multiplexer share the scheduler, so a mistake in it passes every test that compares the two.
This compares with the past: ``worlds`` makes histories as plain data, and ``run`` runs them in the code of a
checkout; ``bin/test oracle`` starts it for the earlier commit and for this one, and shows the first
difference of each world.
"""
