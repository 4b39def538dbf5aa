"""What measures a server: workloads, a load client, reports. Rests on core alone."""
