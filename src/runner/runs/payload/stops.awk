# Made by `python -m bench.docs --write-reference` from runs/why/causes. Do not edit.
# Finds, at the end of the logs of a failed task, an error that comes again after each restart. Prints the code of the
# cause and the line, or nothing. `code` is the exit code of the task. A line with only the character 1 ends each log.
# An error does not count if another exception or 100 more lines follow it in the same log: the program has handled it.
$0 == "\001" { end_of_log(); next }
{ number++ }
BEGIN { codes[126] = "exit-not-executable"; codes[127] = "exit-not-found" }
match($0, /error: (unrecognized arguments|the following arguments are required|argument [^ ]+: )|TypeError: .*(got an unexpected keyword argument|missing [0-9]+ required )/) { found("arguments"); next }
match($0, /AttributeError: (module|type object) .* has no attribute /) { found("attribute-missing"); next }
match($0, /Error\(s\) in loading state_dict for /) { found("checkpoint-mismatch"); next }
match($0, /most likely due to a circular import/) { found("circular-import"); next }
match($0, /yaml\.(scanner\.ScannerError|parser\.ParserError): /) { found("config-syntax"); next }
match($0, /ValueError: (Feature type '(List|LargeList|Video|Pdf|Json|Mesh|Nifti)' not found|Invalid pattern: '[*][*]')/) { found("dataset-version"); next }
match($0, /AssertionError: Check batch related parameters/) { found("deepspeed-batch"); next }
match($0, /ZeRO parameter intra parallel group is already initialized/) { found("deepspeed-hpz"); next }
match($0, /RuntimeError: .*(to have the same dtype|expected scalar type )/) { found("dtype-mismatch"); next }
match($0, /Expandable segments are not compatible with memory pool/) { found("expandable-segments"); next }
match($0, /^(.*[^A-Za-z])?(FileNotFoundError|NotADirectoryError|IsADirectoryError): \[Errno/) { found("file-missing"); next }
match($0, /(ImportError|OSError): .*version `[A-Z][A-Za-z0-9_.]*' not found/) { found("glibc"); next }
match($0, /Cannot access gated repo for url /) { found("hub-gated"); next }
match($0, /(RepositoryNotFoundError|RevisionNotFoundError|EntryNotFoundError): (401|404) /) { found("hub-missing"); next }
match($0, /Repo id must be in the form /) { found("hub-name"); next }
match($0, /401 Client Error: Unauthorized for url: /) { found("hub-token"); next }
match($0, /ImportError: cannot import name '[A-Za-z_0-9.]*' from '/) { found("import-name"); next }
match($0, /Cannot find a build variant for this system|does not have build: /) { found("kernel-variant"); next }
match($0, /of the rendezvous endpoint '.*' must be|Unsupported nproc_per_node value/) { found("launcher-argument"); next }
match($0, /(ImportError|OSError): .*cannot open shared object file/) { found("library-missing"); next }
match($0, /NotImplementedError: Cannot copy out of meta tensor/) { found("meta-tensor"); next }
match($0, /ValueError: Unrecognized model in /) { found("model-config"); next }
match($0, /but Transformers does not recognize this architecture/) { found("model-unknown"); next }
match($0, /(ModuleNotFoundError|ImportError): No module named|python[0-9.]*: No module named /) { found("module-missing"); next }
match($0, /(AssertionError|ValueError): .* is not divisible by /) { found("parallel-sizes"); next }
match($0, /PermissionError: \[Errno 13\] /) { found("permission"); next }
match($0, /can't open file .*\[Errno 2\]/) { found("script-missing"); next }
match($0, /RuntimeError: (mat1 and mat2 shapes cannot be multiplied|The size of tensor a .* must match the size of tensor b|Sizes of tensors must match)/) { found("shape-mismatch"); next }
match($0, /: syntax error near unexpected token/) { found("shell-syntax"); next }
match($0, /AF_UNIX path (length cannot exceed|too long)/) { found("socket-path"); next }
match($0, /^(.*[^A-Za-z])?(SyntaxError|IndentationError|TabError): /) { found("syntax"); next }
match($0, /: unbound variable$/) { found("unbound-variable"); next }
match($0, /(ImportError|OSError): .*undefined symbol: /) { found("undefined-symbol"); next }
/ChildFailedError|SignalException|DistBackendError|DistNetworkError/ { next } # they follow an error of another process
/(^|[^A-Za-z])[A-Za-z_]*(Error|Exception): / { cause = "" }
END {
    end_of_log()
    if (!told && (code in codes)) print codes[code], "exit code " code
}
function found(name) {
    cause = name
    line = substr($0, RSTART, 300)
    at = number
}
function end_of_log() {
    if (cause && !told && number - at <= 100) {
        print cause, line
        told = 1
    }
    cause = ""
}
