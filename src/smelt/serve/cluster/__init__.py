"""Several engines behind one server as Ray Serve replicas. Needs the extra `cluster`; serving imports Ray only here."""
