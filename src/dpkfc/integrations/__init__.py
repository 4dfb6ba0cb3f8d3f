"""Adapters for scripts written for other libraries; each is imported only when asked for."""
