"""Several engines behind one server, placed and replaced by Ray Serve. Needs the extra `cluster`; only here is Ray
imported."""
