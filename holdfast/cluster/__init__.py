"""Many engines behind one API process: which one serves a request (pure), and the replicas themselves."""
