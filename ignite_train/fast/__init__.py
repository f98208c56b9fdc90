"""Accelerations, each of which does what the plain update does. The core imports none of them; see `choose`."""
