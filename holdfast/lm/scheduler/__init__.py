"""What runs next: queues, policies and orders, from requests to a StepPlan. Pure: time is an argument."""
