"""Files and batches: work that is handed in whole and answered later."""
