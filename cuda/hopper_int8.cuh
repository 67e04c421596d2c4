// wgmma on int8 operands with int32 sums, and what finishes and writes these: the int8
// side of hopper.cuh. Both operands run along the summed channels; a stage's row of 128
// bytes has 128 of these, a wgmma 32. Reads integer_epilogue.cuh too.

namespace lattice {

// From here on, operands are ints.
#undef LATTICE_R8
#define LATTICE_R8(d, i)                                                       \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), \
      "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])

#define LATTICE_WGMMA(N, R, A, B)                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8"             \
               " {" LATTICE_N##R "}, %" #A ", %" #B ", 1;"                        \
               : LATTICE_R##R(d, 0)                                               \
               : "l"(a), "l"(b))

// d (64 x N, N / 2 sums a thread) += a (64 x 32) * b (32 x N).
template <typename T, int N, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void wgmma(int (&d)[N / 2], unsigned long long a,
                                      unsigned long long b) {
  static_assert(!A_TRANSPOSED && !B_TRANSPOSED, "int8 runs along the summed channels");
  static_assert(N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 112 ||
                    N == 128 || N == 160 || N == 192 || N == 224 || N == 256,
                "no such tile");
  if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17);
  if constexpr (N == 48) LATTICE_WGMMA(48, 24, 24, 25);
  if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33);
  if constexpr (N == 80) LATTICE_WGMMA(80, 40, 40, 41);
  if constexpr (N == 96) LATTICE_WGMMA(96, 48, 48, 49);
  if constexpr (N == 112) LATTICE_WGMMA(112, 56, 56, 57);
  if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65);
  if constexpr (N == 160) LATTICE_WGMMA(160, 80, 80, 81);
  if constexpr (N == 192) LATTICE_WGMMA(192, 96, 96, 97);
  if constexpr (N == 224) LATTICE_WGMMA(224, 112, 112, 113);
  if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129);
}
#undef LATTICE_WGMMA

// Four lanes exchange words: word i of lane l becomes word l of lane i. All must call it.
__device__ __forceinline__ uint4 turned_words(const unsigned (&v)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const unsigned p = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
  const unsigned q = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  const unsigned a0 = odd ? p : v[0], a1 = odd ? v[1] : p;
  const unsigned a2 = odd ? q : v[2], a3 = odd ? v[3] : q;
  const unsigned r = __shfl_xor_sync(~0u, upper ? a0 : a2, 2);
  const unsigned s = __shfl_xor_sync(~0u, upper ? a1 : a3, 2);
  return upper ? make_uint4(r, s, a2, a3) : make_uint4(a0, a1, r, s);
}

// 16 bytes, or zeros. Whether they are aligned is asked at each load: twice the code of all
// that follows would take registers.
template <typename T>
__device__ __forceinline__ uint4 load16(const T* from, bool present, bool is_aligned) {
  using Chunk = Channels<T, 16 / sizeof(T)>;
  Chunk chunk = {};
  if (present) {
    if (is_aligned) chunk = load_channels<16 / sizeof(T)>(from, cuda::std::true_type());
    else chunk = load_channels<16 / sizeof(T)>(from, cuda::std::false_type());
  }
  return *reinterpret_cast<const uint4*>(&chunk);
}

// Lane l of four has 16 int8 columns from 16 l on: they exchange them for the pairs at
// 8 j + 2 l, in the order of wgmma's sums, j and j + 1 in a word; and back.
__device__ __forceinline__ uint4 pairs_of_columns(uint4 v) {
  return turned_words({__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                       __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)});
}
__device__ __forceinline__ uint4 columns_of_pairs(const unsigned (&pairs)[4]) {
  const uint4 v = turned_words(pairs);
  return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410),
                    __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
}

// As that of float32 sums. Goes by pieces, 64 columns of a row; pieces of the residual are on
// their way AHEAD. Partial sums, of OUT int, are written as they are.
template <int BN, int REGISTERS, int BLOCKS, typename OUT, typename AFTER>
struct SortedResult<signed char, BN, REGISTERS, BLOCKS, OUT, AFTER> {
  using R = typename AFTER::Residual;
  static constexpr int PER = (BN + 63) / 64, PIECES = BLOCKS * 2 * PER;
  static constexpr int CHUNKS = sizeof(R);  // of 16 bytes, that a thread has of a piece
  static constexpr int ROOM = (REGISTERS - 40) / (4 * CHUNKS);
  static constexpr int AHEAD = !AFTER::HAS_RESIDUAL || ROOM < 2 ? 1 : ROOM < 4 ? ROOM : 4;
  const AFTER& after;
  const float2* kept;
  const int* rows;
  OUT* y;
  int n_out, split, c_out;
  int first_column = 0;
  int row[BLOCKS][2] = {};  // those of a thread; -1 beyond the last
  float step = 1.0f, inverse = 1.0f;
  uint4 held[AHEAD][CHUNKS] = {};

  __device__ __forceinline__ void begin(int first_row, int column) {
    first_column = column;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) find_rows(row[j], rows, first_row + 64 * j, n_out);
    if constexpr (AFTER::FINISHES) {
      step = after.step(), inverse = inverse_of<OUT>(after);
    }
  }

  __device__ __forceinline__ void ahead() {
#pragma unroll
    for (int piece = 0; piece < AHEAD; ++piece) fetch(piece);
  }

  // Columns of a piece, from `column` on, that there are.
  __device__ __forceinline__ int columns(int of, int column) const {
    const int left = min(c_out - first_column, BN) - column;
    return of < 0 ? 0 : left;
  }

  // Has a piece of the residual on its way.
  __device__ __forceinline__ void fetch(int piece) {
    if constexpr (AFTER::HAS_RESIDUAL) {
      if (piece >= PIECES) return;
      const int of = row[piece / (2 * PER)][piece / PER & 1], column = piece % PER * 64;
      const int left = columns(of, column), lane = threadIdx.x & 3;
      const R* from = after.residual + (long long)of * c_out + first_column + column;
      const bool is_aligned =
          (reinterpret_cast<unsigned long long>(after.residual) & 15) == 0;
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        uint4& to = held[piece % AHEAD][i];
        if constexpr (sizeof(R) == 4) {  // two pairs
          const int at = 16 * i + 2 * lane;
          const float* f = reinterpret_cast<const float*>(from + at);
          to.x = at < left ? __float_as_uint(f[0]) : 0;
          to.y = at < left ? __float_as_uint(f[1]) : 0;
          to.z = at + 8 < left ? __float_as_uint(f[8]) : 0;
          to.w = at + 8 < left ? __float_as_uint(f[9]) : 0;
        } else {
          const int at = 64 / CHUNKS * i + 16 / int(sizeof(R)) * lane;
          to = load16(from + at, at < left, is_aligned);
        }
      }
    }
  }

  // The pairs of a piece that has come, in the order of the sums.
  __device__ __forceinline__ void take(R (&added)[16], int piece) {
    if constexpr (AFTER::HAS_RESIDUAL) {
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        uint4 v = held[piece % AHEAD][i];
        if constexpr (sizeof(R) == 1) v = pairs_of_columns(v);
        if constexpr (sizeof(R) == 2) v = turned_words({v.x, v.y, v.z, v.w});
        *reinterpret_cast<uint4*>(added + 16 / sizeof(R) * i) = v;
      }
    }
  }

  __device__ __forceinline__ void store(int (&sums)[BN / 2], int block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row[block][half];
      OUT* to = y + ((long long)split * n_out + of) * c_out + first_column;
#pragma unroll
      for (int part = 0; part < PER; ++part) {
        const int piece = (2 * block + half) * PER + part;
        alignas(16) R added[16] = {};
        take(added, piece);
        fetch(piece + AHEAD);
        store_piece(sums, added, to + 64 * part, 64 * part, half, columns(of, 64 * part));
      }
    }
  }

  // Finishes a piece and writes it, 16 bytes a lane.
  __device__ __forceinline__ void store_piece(int (&sums)[BN / 2], const R (&added)[16],
                                              OUT* to, int column, int half, int left) {
    const int lane = threadIdx.x & 3;
    unsigned words[4] = {};
#pragma unroll
    for (int j = 0; j < 8 && column + 8 * j < BN; ++j) {
      const int c = 8 * j + 2 * lane, at = (column + 8 * j) / 2 + 2 * half;
      if constexpr (!AFTER::FINISHES) {
        if (c < left) *reinterpret_cast<int2*>(to + c) = make_int2(sums[at], sums[at + 1]);
      } else {
        const float4 of = *reinterpret_cast<const float4*>(kept + column + c);
        const float u =
            after.finish(sums[at], make_float2(of.x, of.y), added[2 * j], step);
        const float v =
            after.finish(sums[at + 1], make_float2(of.z, of.w), added[2 * j + 1], step);
        if constexpr (sizeof(OUT) == 4) {
          if (c < left) *reinterpret_cast<float2*>(to + c) = make_float2(u, v);
        } else if constexpr (sizeof(OUT) == 2) {
          words[j & 3] = pack2<OUT>(u, v);
          // 48 columns are one and a half times 32.
          if ((j & 3) == 3 || column + 8 * j + 8 == BN) {
            const uint4 own = turned_words(words);
            const int own_c = 8 * ((j & 4) + lane);
            if (own_c < left) *reinterpret_cast<uint4*>(to + own_c) = own;
          }
        } else {
          const unsigned pair =
              __byte_perm(quantised(u, inverse), quantised(v, inverse), 0x0040);
          words[j / 2] = j & 1 ? __byte_perm(words[j / 2], pair, 0x5410) : pair;
        }
      }
      // The next loads from shared memory stay behind: registers are few.
      if (j & 1) asm volatile("" ::: "memory");
    }
    if constexpr (AFTER::FINISHES && is_integer<OUT>) {
      const uint4 own = columns_of_pairs(words);
      if (16 * lane < left) *reinterpret_cast<uint4*>(to + 16 * lane) = own;
    }
  }
};

}  // namespace lattice
