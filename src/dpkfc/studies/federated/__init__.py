"""The setting of the DP-FedSOFIM paper: a linear head on frozen features, twenty clients, every arm tuned alike."""
