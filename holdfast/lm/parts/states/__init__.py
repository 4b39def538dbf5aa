"""Recurrent states: the copies between the slots of running sequences and those of snapshots."""
