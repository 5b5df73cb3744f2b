# Finds faults of the machine in the logs of a failed task. Prints `gpu` or `network` and the line that tells it, or nothing.
# `runner why` knows the same messages (runs/why/causes).

# messages of drivers and CUDA after which a GPU is unusable
/uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable|uncorrectable hardware error|[Uu]ncorrectable NVLink error/ { gpu = gpu ? gpu : $0 }
/GPU has fallen off the bus|fallen off the bus and is not responding|GPU is lost|ERROR_GPU_IS_LOST/ { gpu = gpu ? gpu : $0 }
/Unable to determine the device handle for GPU/ { gpu = gpu ? gpu : $0 }

# Programs themselves cause some Xids: https://docs.nvidia.com/deploy/xid-errors. Unless the line names another one before it.
/NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): [0-9]+/ && (!/\): (13|31|43|45|68|94|137),/ ||
    /previous Xid [0-9]/ && !/previous Xid (13|31|43|45|68|94|137)([^0-9]|$)/) { gpu = gpu ? gpu : $0 }

# a collective that never ended
/Watchdog caught collective operation timeout|Heartbeat monitor timed out|timed out in blocking wait/ { network = network ? network : $0 }
/detected a dump of timeout|failed to pass monitoredBarrier in|[HRX]CCL timeout/ { network = network ? network : $0 }
/Timed out waiting [0-9]+ms for (recv|send) operation to complete/ { network = network ? network : $0 }

END {
    if (gpu) print "gpu " substr(gpu, 1, 300)
    else if (network) print "network " substr(network, 1, 300)
}
