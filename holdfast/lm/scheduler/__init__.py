"""The scheduler: queues, policies and orders that turn requests into a StepPlan. Pure: time is an argument."""
