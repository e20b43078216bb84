#!/bin/sh
# Runs a command beside a throw-away sshd on loopback, with its own keys and
# configuration, and says how to reach it in CULPRIT_TEST_SSH.
# Debian: apt-get install openssh-server
set -eu
sshd=$(command -v sshd || echo /usr/sbin/sshd)
dir=$(mktemp -d)
port=$((20000 + $$ % 20000))
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd # root's sshd wants it
ssh-keygen -q -t ed25519 -N '' -f "$dir/host"
ssh-keygen -q -t ed25519 -N '' -f "$dir/user"
cat >"$dir/sshd_config" <<END
ListenAddress 127.0.0.1
Port $port
HostKey $dir/host
AuthorizedKeysFile $dir/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
END
cat >"$dir/ssh_config" <<END
Host testhost
  HostName 127.0.0.1
  Port $port
  User $(id -un)
  IdentityFile $dir/user
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking accept-new
  UserKnownHostsFile $dir/known
  LogLevel ERROR
END
"$sshd" -D -f "$dir/sshd_config" -E "$dir/log" &
server=$!
trap 'kill $server; rm -rf "$dir"' EXIT
i=0
until ssh -F "$dir/ssh_config" testhost true 2>"$dir/why"; do
  i=$((i + 1))
  [ $i -lt 50 ] || { cat "$dir/why" "$dir/log"; exit 1; }
  sleep 0.1
done
CULPRIT_TEST_SSH="ssh -F $dir/ssh_config -T testhost" "$@"
