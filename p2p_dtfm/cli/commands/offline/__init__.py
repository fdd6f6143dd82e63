"""Commands that ask no daemon and touch no home. They register themselves with `app`."""
