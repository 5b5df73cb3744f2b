function __runner_words
    set -l words (commandline -opc) (commandline -ct)
    set -l found (command runner completion words -- $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c runner -f -a '(__runner_words)'
