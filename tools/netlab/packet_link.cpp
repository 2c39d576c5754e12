// Carries IPv4 packets between TUN devices with a rate, a delay and losses: a switch in user space,
// for kernels without netem. Device i is host i; a destination's last byte is its host plus one.
//
// set[0] delay in seconds, set[1] share of packets lost, set[2] not 0: return;
// set[4 + 2 i] bytes a second of host i's link, 0 without limit, set[5 + 2 i] not 0: it is cut.
// They may change at any time; they are read anew for each packet.
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <vector>

namespace {

struct Packet {
  uint64_t due;
  std::vector<unsigned char> bytes;
};

struct Host {
  uint64_t up = 0, down = 0;  // when its link is free again, either way
  uint64_t queued = 0;        // bytes on their way to it
  std::deque<Packet> way;
};

uint64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}

uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

// How long a link is busy with so many bytes.
uint64_t busy(double rate, long bytes) { return rate > 0 ? uint64_t(bytes * 1e9 / rate) : 0; }

}  // namespace

extern "C" int packet_link(int n, const int* fds, const volatile double* set, uint64_t seed) {
  std::vector<Host> hosts(n);
  std::vector<pollfd> ready(n);
  for (int i = 0; i < n; i++) ready[i] = {fds[i], POLLIN, 0};
  std::vector<unsigned char> buffer(65536);
  uint64_t random = seed | 1;
  while (set[2] == 0) {
    uint64_t t = now(), next = t + 50000000ull;  // settings are looked at 20 times a second at least
    for (auto& h : hosts)
      if (!h.way.empty() && h.way.front().due < next) next = h.way.front().due;
    uint64_t rest = next > t ? next - t : 0;
    timespec wait = {time_t(rest / 1000000000ull), long(rest % 1000000000ull)};
    ppoll(ready.data(), n, &wait, nullptr);
    for (int i = 0; i < n; i++) {
      for (int k = 0; k < 64; k++) {  // then the next host has its turn
        long size = read(fds[i], buffer.data(), buffer.size());
        if (size < 20) break;
        int j = int(buffer[19]) - 1;
        if ((buffer[0] >> 4) != 4 || j < 0 || j >= n || j == i) continue;
        if (set[5 + 2 * i] != 0 || set[5 + 2 * j] != 0) continue;
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        if (double(random >> 11) * 0x1p-53 < set[1]) continue;
        double in = set[4 + 2 * i], out = set[4 + 2 * j], delay = set[0];
        // As with tbf, a queue holds 200 ms of the rate, besides what is under way.
        double room = out > 0 ? out * (0.2 + 2 * delay) + 65536 : 64e6;
        if (double(hosts[j].queued) > room) continue;
        t = now();
        hosts[i].up = later(hosts[i].up, t) + busy(in, size);
        // The second link may start when the first has begun to deliver: packets follow each other.
        uint64_t whole = busy(out, size);
        uint64_t begun = hosts[i].up - busy(in, size);
        hosts[j].down = later(later(hosts[j].down, begun) + whole, hosts[i].up);
        Packet p{hosts[j].down + uint64_t(delay * 1e9), {}};
        p.bytes.assign(buffer.begin(), buffer.begin() + size);
        hosts[j].queued += uint64_t(size);
        hosts[j].way.push_back(std::move(p));
      }
    }
    t = now();
    for (int j = 0; j < n; j++) {
      auto& h = hosts[j];
      while (!h.way.empty() && h.way.front().due <= t) {
        Packet& p = h.way.front();
        if (set[5 + 2 * j] == 0 && write(fds[j], p.bytes.data(), p.bytes.size()) < 0) {
          // a host that has no room drops the packet, as a real one would
        }
        h.queued -= p.bytes.size();
        h.way.pop_front();
      }
    }
  }
  return 0;
}
