package probe

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// knock connects to a port that a process listens on, and hangs up: a server
// that sleeps in its event loop wakes up, and runs what was queued for it. Such
// a connection without a request is what a load balancer's check makes.
func knock(ctx context.Context, pid int) {
	for _, address := range listensOn(pid) {
		d := net.Dialer{Timeout: 100 * time.Millisecond}
		if conn, err := d.DialContext(ctx, "tcp", address); err == nil {
			_ = conn.Close() // it was only to be opened
			return
		}
	}
}

// listensOn are the addresses of a process's listening TCP sockets.
func listensOn(pid int) []string {
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return nil
	}
	sockets := map[string]bool{}
	for _, fd := range fds {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil {
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				sockets[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	var addresses []string
	for _, table := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
			fields := strings.Fields(line)
			const address, state, inode, listening = 1, 3, 9, "0A"
			if len(fields) > inode && fields[state] == listening && sockets[fields[inode]] {
				if a := tcpAddress(fields[address]); a != "" {
					addresses = append(addresses, a)
				}
			}
		}
	}
	return addresses
}

// tcpAddress reads 0100007F:1F90, an address in the machine's byte order, word
// by word. One that stands for all of the machine's becomes the loopback's.
func tcpAddress(text string) string {
	host, port, _ := strings.Cut(text, ":")
	n, err := strconv.ParseUint(port, 16, 16)
	ip, err2 := hex.DecodeString(host)
	if err != nil || err2 != nil || len(ip)%4 != 0 {
		return ""
	}
	for i := 0; i < len(ip); i += 4 {
		ip[i], ip[i+1], ip[i+2], ip[i+3] = ip[i+3], ip[i+2], ip[i+1], ip[i]
	}
	at := net.IP(ip)
	switch {
	case at.IsUnspecified() && len(ip) == net.IPv4len:
		at = net.IPv4(127, 0, 0, 1)
	case at.IsUnspecified():
		at = net.IPv6loopback
	}
	return net.JoinHostPort(at.String(), strconv.FormatUint(n, 10))
}
