#!/bin/sh
# The first program of a guest: loads drivers, mounts the root disk, hands over to the agent.
# With -no-reboot on the VMM a forced reboot ends the machine; microvm has no other power switch.

fail() {
    echo "forkd-init: FAILED: $*"
    reboot -f
}

mount -t proc proc /proc || fail "cannot mount /proc"
case " $(cat /proc/cmdline) " in
*" forkd.probe "*)
    echo "FORKD-PROBE-OK"
    reboot -f
    ;;
esac
mount -t sysfs sysfs /sys || fail "cannot mount /sys"
mount -t devtmpfs devtmpfs /dev || fail "cannot mount /dev"

for module in /modules/*.ko; do
    [ -e "$module" ] || continue
    insmod "$module" || echo "forkd-init: warning: ${module##*/} did not load"
done

tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ $tries -le 500 ] || fail "no /dev/vda after 10 s: no disk, or a kernel without virtio-mmio and virtio-blk"
    usleep 20000
done
mount -t ext4 -o rw,noatime /dev/vda /newroot || fail "cannot mount /dev/vda as ext4"

cd /newroot || fail "cannot enter the root disk"
mkdir -p dev proc sys run tmp || fail "cannot make the mount points on the root disk"
mount -t tmpfs -o mode=0755,nosuid,nodev tmpfs run || fail "cannot mount /run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs tmp || fail "cannot mount /tmp"
mkdir run/forkd && cp -R /forkd/forkd_agent run/forkd/ || fail "cannot copy the agent to /run/forkd"

# A file of its own over boot_id, so that each child can be told apart after a fork.
cat /proc/sys/kernel/random/boot_id >run/forkd/boot_id || fail "cannot read boot_id"

mount --move /dev dev || fail "cannot move /dev"
mount --move /sys sys || fail "cannot move /sys"
mount --move /proc proc || fail "cannot move /proc"
mount --bind run/forkd/boot_id proc/sys/kernel/random/boot_id || fail "cannot cover boot_id"

mkdir -p dev/pts dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts dev/pts || fail "cannot mount /dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs dev/shm || fail "cannot mount /dev/shm"
mount -t cgroup2 cgroup2 sys/fs/cgroup || echo "forkd-init: warning: no cgroup2"
# devtmpfs holds device nodes only; these are udev's work elsewhere.
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
ip link set lo up || echo "forkd-init: warning: no loopback network"

for python in /usr/local/bin/python3 /usr/bin/python3; do
    # -L: an absolute link cannot be followed from here, but will be after the switch.
    if [ -x "/newroot$python" ] || [ -L "/newroot$python" ]; then
        export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
        export HOME=/root LANG=C.UTF-8
        exec switch_root /newroot "$python" /run/forkd/forkd_agent/init.py
    fi
done
fail "the root disk has no python3 in /usr/local/bin or /usr/bin"
