"""Measures serving: workloads, load client, simulator, capacity planning, reports. No serving code imports it."""
