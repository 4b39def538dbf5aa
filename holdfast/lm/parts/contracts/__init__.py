"""Contracts: requests that are promised their times when they are accepted, or refused."""
