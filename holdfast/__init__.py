"""Holdfast serves language models: it holds each conversation's state and keeps every stream's pace."""
